"""The worker's process, with the time that its forward passes take kept in a file: benchmarks/throughput.py starts it.

The file is two little-endian numbers, steps (int64) and seconds (float64), since the process started.
"""

import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

from refold.gpu import process_main


def keep_time(path: str) -> None:
    """Wrap `run` of all forms of a model; loads torch."""
    from refold.gpu.model_runner import ModelRunner
    from refold.gpu.native_runner import NativeRunner

    Path(path).write_bytes(bytes(16))
    with open(path, "r+b") as file:  # noqa: PTH123 - it is mapped
        shared = mmap.mmap(file.fileno(), 16)
    kept = [0, 0.0]

    def timed(plain: Any) -> Any:
        def run(self: Any, entries: Any) -> Any:
            started_s = time.perf_counter()
            found = plain(self, entries)
            kept[0] += 1
            kept[1] += time.perf_counter() - started_s
            shared[:16] = struct.pack("<qd", *kept)
            return found

        return run

    for form in (ModelRunner, NativeRunner):
        form.run = timed(form.run)  # type: ignore[method-assign]


if __name__ == "__main__":
    create_worker = process_main.create_worker

    def create_timed(*arguments: Any, **options: Any) -> Any:
        keep_time(sys.argv[1])  # not before: signs of life begin when the engine has said hello
        return create_worker(*arguments, **options)

    process_main.create_worker = create_timed
    sys.exit(process_main.main())
