"""What the job costs at least: `python plain_program.py SRC OUT BYTES`.

Reads every file of SRC and writes BYTES of what it reads into files of the same names in OUT, made durable as
the job's are: each file is synchronized, then the directory. It computes nothing and imports nothing.
"""

import os
import sys

BLOCK = 1 << 22


def main(source: str, out: str, size: int) -> None:
    """Read all, write so much of it, and wait until it is on disk."""
    names = sorted(os.listdir(source))
    total = sum(os.path.getsize(os.path.join(source, name)) for name in names)
    os.mkdir(out)
    block = memoryview(bytearray(BLOCK))
    read = written = 0
    for name in names:
        with (
            open(os.path.join(source, name), "rb", buffering=0) as reading,
            open(os.path.join(out, name), "wb", buffering=0) as writing,
        ):
            while count := reading.readinto(block):
                read += count
                part = block[: max(0, read * size // total - written)]
                written += len(part)
                while part:
                    part = part[writing.write(part) :]
            os.fsync(writing.fileno())
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
