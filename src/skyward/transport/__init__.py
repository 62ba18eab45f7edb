"""How bytes travel between processes: frames, links that resume, payloads, blobs, streams."""

__all__: list[str] = []
