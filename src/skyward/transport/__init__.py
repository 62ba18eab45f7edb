"""How bytes travel between our processes: frames, links that resume, payloads, blobs, streams."""

__all__: list[str] = []
