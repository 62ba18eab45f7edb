"""Runs joblib's own parallel tests on a pool: wherever they name a process backend, ours is used instead."""

from __future__ import annotations

from figures import Figures
from peers import run

__all__ = ["SKIPPED", "main"]

SCRIPTS = "starts a fresh interpreter in which no pool is open"
SEQUENTIAL = "wants threads for a Parallel inside a task; on a node it runs one by one"
MEMMAP = "wants numpy.memmap; large arrays arrive as read-only arrays over a map"
LOKY = (
    "initializer= belongs to joblib's process pool; on a pool the image and plugins do that, and it is refused in words"
)

SKIPPED = {
    "test_dispatch_multiprocessing": "proxies of a multiprocessing.Manager work in children of this process only",
    "test_nested_backend_context_manager": SEQUENTIAL,
    "test_nested_parallelism_limit": SEQUENTIAL,
    "test_thread_bomb_mitigation": SEQUENTIAL,
    "test_parallel_with_interactively_defined_functions": SCRIPTS,
    "test_parallel_with_unpicklable_functions_in_args": SCRIPTS,
    "test_auto_memmap_on_arrays_from_generator": MEMMAP,
    "test_memmapping_leaks": MEMMAP,
    "test_initializer_context": LOKY,
    "test_initializer_parallel": LOKY,
    "test_error_capture": "looks at the process pool inside joblib's own backends",
    "test_nested_parallel_warnings": "only joblib's own backends, with forks",
    "test_nested_loop[skyward-back_compat_backend]": "a second loky pool in a process whose first one has been ended",
}


def main() -> Figures:
    """Runs them."""
    return run("joblib test_parallel", ["joblib.test.test_parallel"], SKIPPED, active=False)


if __name__ == "__main__":
    print(main())
