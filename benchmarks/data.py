"""Large arrays: there and back, and to all nodes at once."""

from __future__ import annotations

import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from socket import create_connection, create_server, socket
from typing import Any

from contest import Medians, Row
from peers import dask_client, ray_actors

__all__ = ["CONTENDERS", "rows"]

NODES = 4
ECHOED, BROADCAST = 100, 50  # MB
REPEATS = 3
_LENGTH = struct.Struct("!Q")


def rows(seen: Medians) -> list[Row]:
    """The lines of this group."""
    echo, broadcast = seen("skyward", "echo"), seen("skyward", "broadcast")
    return [
        Row("100 MB array there and back", echo, "raw socket", seen("socket", "echo"), "s", at_most=0.4),
        Row("100 MB array there and back", echo, "ray actor", seen("ray", "echo"), "s", at_most=1.0),
        Row("50 MB argument to 4 nodes", broadcast, "dask tasks", seen("dask", "broadcast"), "s", at_most=0.25),
        Row("50 MB argument to 4 nodes", broadcast, "dask scatter(broadcast)", seen("dask", "scatter"), "s"),
        Row("50 MB argument to 4 nodes", broadcast, "ray put", seen("ray", "broadcast"), "s"),
    ]


def echo(array: Any) -> Any:
    """Gives the array back."""
    return array


def touch(array: Any) -> int:
    """Reads something of every page, so that an array counts as arrived only when it can really be read."""
    return int(array[::512].sum())


def with_skyward(quick: bool) -> dict[str, float]:
    """Both through a pool."""
    import skyward as sky

    back, there = sky.compute(echo), sky.compute(touch)
    with sky.ComputePool(nodes=NODES, console=False) as pool:
        _ = there(_array(2)) @ pool
        return {
            "echo": _median(lambda array: touch(back(array) >> pool), ECHOED, quick),
            "broadcast": _median(lambda array: there(array) @ pool, BROADCAST, quick),
        }


def with_ray(quick: bool) -> dict[str, float]:
    """Both through actors and ray's shared memory."""
    with ray_actors(NODES, echo, touch) as (ray, actors):

        def broadcast(array: Any) -> None:
            ref = ray.put(array)
            ray.get([actor.touch.remote(ref) for actor in actors])

        broadcast(_array(2))
        return {
            "echo": _median(lambda array: touch(ray.get(actors[0].echo.remote(array))), ECHOED, quick),
            "broadcast": _median(broadcast, BROADCAST, quick),
        }


def with_dask(quick: bool) -> dict[str, float]:
    """A task for each worker with the array as its argument, and one copy scattered to all workers first."""
    with dask_client(NODES) as (client, workers):

        def submit(argument: Any) -> None:
            client.gather([client.submit(touch, argument, workers=[address], pure=False) for address in workers])

        submit(_array(2))
        return {
            "broadcast": _median(submit, BROADCAST, quick),
            "scatter": _median(lambda array: submit(client.scatter(array, broadcast=True)), BROADCAST, quick),
        }


def with_socket(quick: bool) -> dict[str, float]:
    """There and back over one loopback connection, function and array pickled into one string of bytes."""
    import cloudpickle

    with create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    with subprocess.Popen([sys.executable, __file__, port], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with create_connection(("127.0.0.1", int(port))) as connection:

            def there_and_back(array: Any) -> int:
                _send(connection, cloudpickle.dumps((echo, (array,))))
                return touch(cloudpickle.loads(_receive(connection)))

            there_and_back(_array(2))
            return {"echo": _median(there_and_back, ECHOED, quick)}


CONTENDERS = {"skyward": with_skyward, "socket": with_socket, "ray": with_ray, "dask": with_dask}


def _median(act: Callable[[Any], Any], megabytes: int, quick: bool) -> float:
    """Seconds for one array; each time another one, since what is known already need not travel again."""
    seconds: list[float] = []
    for _ in range(1 if quick else REPEATS):
        array = _array(megabytes // 10 if quick else megabytes)
        began = time.perf_counter()
        act(array)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _array(megabytes: int) -> Any:
    import numpy as np

    return np.random.default_rng().integers(0, 1 << 62, megabytes * 1_000_000 // 8)


def _send(connection: socket, data: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def _receive(connection: socket) -> bytearray:
    data = _exactly(connection, _LENGTH.size)
    return _exactly(connection, *_LENGTH.unpack(data)) if data else data


def _exactly(connection: socket, count: int) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        got = connection.recv_into(view[at:])
        if not got:
            return bytearray()
        at += got
    return data


def _serve(port: int) -> None:
    import cloudpickle
    import numpy as np  # noqa: F401 - as in a node that has had an array before

    with create_server(("127.0.0.1", port)) as listener:
        print("ready", flush=True)
        connection, _ = listener.accept()
        with connection:
            while data := _receive(connection):
                function, arguments = cloudpickle.loads(data)
                _send(connection, cloudpickle.dumps(function(*arguments)))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
