"""The workings between a pool and its nodes; the only part that imports distributed.

client.py   the client's side: links, dispatch, results      (in the user's process)
keeper.py   starts and watches what runs on one machine       (one on each machine)
agent.py    one node: queue, runners, output, dask worker     (forked from the keeper)
link.py     numbered frames over TLS that survive a broken connection
dispatch.py which node gets which call                        (pure)
certs.py    the pool's own certificate authority
"""

__all__: list[str] = []
