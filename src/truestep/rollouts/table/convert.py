"""The conversion of rollout files to tables, in parts that worker processes convert in parallel.

A worker (`python -m truestep.rollouts.table.convert`) reads jobs as JSON lines from stdin and answers each with a line.
It imports no torch, and exits when its input ends.
"""

import gc
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from truestep.files.bounded import read_lines as read_bounded_lines
from truestep.process import progress
from truestep.ranks.processes import usable_cores
from truestep.rollouts.fields import Field, declarations, declare, optional
from truestep.rollouts.files import DataError, line_content, parse_json, readable
from truestep.rollouts.parquet import read_parquet
from truestep.rollouts.record import Checks, Needs, parse_record
from truestep.rollouts.table.layout import ABSENT_TEMPERATURE, PartWriter
from truestep.rollouts.table.lines import read_lines
from truestep.rollouts.values import BadRecord
from truestep.types import Rollout

PART_BYTES = 1 << 26  # bytes of the file per part
BLOCK_BYTES = 1 << 18  # bytes of lines that are parsed together
# Only checks that do not depend on a run, so that a table serves every run.
NEUTRAL = Checks(Needs(logprobs=False, advantages=False, advantage_rule="none"), default_temperature=ABSENT_TEMPERATURE)


@dataclass(frozen=True)
class Job:
    """A part of a file: a range of bytes of JSONL at line boundaries, or a range of row groups of Parquet."""

    file: str
    start: int
    end: int
    size: int  # bytes, for the progress display
    output: str  # path without suffix
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)  # declarations of the user's fields

    @property
    def checks(self) -> Checks:
        """The checks of values only, since the required fields depend on the run."""
        return replace(NEUTRAL, fields=optional(declare(self.fields)))


def is_parquet(path: str | Path) -> bool:
    return Path(path).suffix.lower() == ".parquet"


def jobs_of(path: Path, directory: Path, declared: Sequence[Field] = ()) -> list[Job]:
    """Return the jobs that convert a file, one per part."""
    bounds = _row_group_bounds(path) if is_parquet(path) else _line_bounds(path)
    return [
        Job(str(path), start, end, size, str(directory / f"{number:06d}"), declarations(declared))
        for number, (start, end, size) in enumerate(bounds)
    ]


def _line_bounds(path: Path) -> Iterator[tuple[int, int, int]]:
    size, start = path.stat().st_size, 0
    with path.open("rb") as file:
        while start < size:
            file.seek(min(start + PART_BYTES, size) - 1)
            while (piece := file.readline(1 << 20)) and not piece.endswith(b"\n"):
                continue  # a line may be very long
            end = file.tell()
            yield start, end, end - start
            start = end


def _row_group_bounds(path: Path) -> Iterator[tuple[int, int, int]]:
    with pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.metadata.num_row_groups)]
    start = size = 0
    for number, added in enumerate(sizes):
        if size and size + added > PART_BYTES:
            yield start, number, size
            start, size = number, 0
        size += added
    if sizes:
        yield start, len(sizes), size


def rollouts_of(lines: Sequence[bytes], checks: Checks = NEUTRAL) -> Iterator[Rollout | None]:
    """Yield the rollout of each line, or None for a bad line.

    A line that the fast parser rejects is parsed again by `parse_json`, which decides.
    """
    for line, record in zip(lines, read_lines(lines, checks.fields), strict=True):
        rollout = None if record is None else _judged(record, checks)
        yield _judged(parse_json(line), checks) if rollout is None else rollout


def _judged(record: Any, checks: Checks) -> Rollout | None:
    try:
        return parse_record(readable(record), "", checks)
    except BadRecord:
        return None


def lines_between(job: Job) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (line number within the part, offset, content) of a part; content is None if the line is too long."""
    with open(job.file, "rb", buffering=BLOCK_BYTES) as file:
        file.seek(job.start)
        offset = job.start
        for number, (line, length) in enumerate(read_bounded_lines(file), start=1):
            yield number, offset, line
            offset += length
            if offset >= job.end:
                return


def _add_lines(job: Job, writer: PartWriter) -> int:
    """Add the lines of a part to the writer. Returns the number of lines, blank ones included."""
    number, size, checks = 0, 0, job.checks
    block: list[tuple[int, int, bytes]] = []  # (line from 1 within the part, offset, content)
    for number, offset, line in lines_between(job):
        content = None if line is None else line_content(line, first=offset == 0)
        if content is not None:
            block.append((number, offset, content))
            size += len(content)
        if size >= BLOCK_BYTES or line is None:
            _add_block(block, writer, checks)
            block, size = [], 0
        if line is None:
            writer.add(number, offset, None)
    _add_block(block, writer, checks)
    return number


def _add_block(block: Sequence[tuple[int, int, bytes]], writer: PartWriter, checks: Checks) -> None:
    rollouts = rollouts_of([content for *_, content in block], checks)
    for (number, offset, _), rollout in zip(block, rollouts, strict=True):
        writer.add(number, offset, rollout)


def _add_rows(job: Job, writer: PartWriter) -> int:
    """Add the Parquet rows of a part to the writer. Returns the number of rows."""
    row, checks = 0, job.checks
    for row, record in read_parquet(Path(job.file), list(range(job.start, job.end)), checks.fields):
        writer.add(row, 0, _judged(record, checks))
    return row


def convert_part(job: Job) -> dict[str, Any]:
    """Convert a part, write its files, and return its number of lines."""
    writer = PartWriter(declare(job.fields))
    lines = (_add_rows if is_parquet(job.file) else _add_lines)(job, writer)
    writer.write(Path(job.output))
    return {"lines": lines}


def answer(job: Job) -> dict[str, Any]:
    try:
        return convert_part(job)
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        return {"error": str(error), "errno": getattr(error, "errno", None)}
    except MemoryError:
        return {"error": "out of memory", "errno": None}


class _Worker:
    """A process that converts one part at a time."""

    def __init__(self) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        # Make glibc keep freed memory, which the next block of lines needs again.
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 26), "MALLOC_TRIM_THRESHOLD_": str(1 << 28)}
        command = [sys.executable, "-P", "-m", __name__]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C goes only to the run, which then ends its workers
        )

    def convert(self, job: Job) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line.endswith("\n"):
            code = self.process.wait()
            raise DataError(f"the process that converts {job.file} ended (exit status {code}); it may lack memory")
        result: dict[str, Any] = json.loads(line)
        return result

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # buffered input that the killed process never read
                    continue


def convert(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """Convert parts in parallel on the usable cores, and return the result of each."""
    count = min(usable_cores(), len(jobs))
    if count <= 1:
        results = []
        for job in jobs:
            results.append(answer(job))
            progress.made("bytes read", job.size)
        return results
    local, workers = threading.local(), []

    def run(job: Job) -> dict[str, Any]:
        if not hasattr(local, "worker"):
            local.worker = _Worker()
            workers.append(local.worker)
        return local.worker.convert(job)

    pool = ThreadPoolExecutor(count, thread_name_prefix="convert")
    try:
        futures = {pool.submit(run, job): number for number, job in enumerate(jobs)}
        made: list[dict[str, Any]] = [{} for _ in jobs]
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                number = futures[future]
                made[number] = future.result()
                if "error" in made[number]:
                    return made
                progress.made("bytes read", jobs[number].size)
        return made
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
        pool.shutdown(wait=True)
        for worker in workers:  # includes workers that were started during the first shutdown
            worker.close()


def main() -> None:
    gc.disable()  # the many numbers and lists contain no reference cycles, so collect only between jobs
    for line in sys.stdin:
        job = Job(**json.loads(line))
        result = json.dumps(answer(job)) + "\n"
        try:
            sys.stdout.write(result)
            sys.stdout.flush()
        except BrokenPipeError:  # the run was killed
            os._exit(1)
        gc.collect()


if __name__ == "__main__":
    main()
