"""Exporting the views as Parquet files, a page of rows at a time.

`batch_mates` pairs every entry of a batch with every other, so it has as many times more rows than `tokens` as a batch is wide
(at 128 requests, a million request-events are some sixty million pairs and minutes of work). It's `step_entries` joined with
itself, which whoever reads Parquet does better there; so it's only written where it's named.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from refold.engine.audit.ask import Answer, Questions
from refold.journal.errors import Rejected
from refold.projections.audit.catalogue import VIEWS

_PAGE_ROWS = 50_000
_TEXTS = (
    "stream request_id status finish_reason tenant adapter cache_salt kind detail outcome reason for_request_id stale_policy "
    "cause policy origin mate_request_id mate_kind computed_by_request_id fate close_reason refold_version model environment "
    "message rule chain damage head_hash"
)
PAIRS = "batch_mates"
_FLOATS = "fraction acceptance share mean_owned_blocks"
_TYPES = dict.fromkeys(_TEXTS.split(), "string") | dict.fromkeys(_FLOATS.split(), "float64")


def type_of(column: str) -> str:
    """The type of a view's column, as Arrow calls it; whatever isn't text or a fraction is a 64-bit integer."""
    return _TYPES.get(column, "int64")


def export_views(asked: Questions, folder: str, names: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """Write views as `FOLDER/name.parquet`; yields a view's name and how many rows it had, when it's written.

    Without `names`, every view but `batch_mates`.

    Raises:
        Rejected: pyarrow isn't installed.
        OSError: the folder can't be written.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise Rejected(
            "to export Parquet needs pyarrow, which is not installed: pip install 'refold[analytics]'"
        ) from error
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name in [view.name for view in VIEWS if view.name in names or (not names and view.name != PAIRS)]:
        answer = asked.ask(f"SELECT * FROM {name}")  # noqa: S608 - our own names
        yield name, _write(answer, target / f"{name}.parquet", pa, parquet)


def _write(answer: Answer, path: Path, pa: Any, parquet: Any) -> int:
    """Write rows to a file that appears when it is whole."""
    schema = pa.schema([(column, getattr(pa, type_of(column))()) for column in answer.columns])
    unfinished, num_rows = path.with_name(f"{path.name}.part"), 0
    with parquet.ParquetWriter(unfinished, schema) as writer:
        while page := list(islice(answer.rows, _PAGE_ROWS)):
            columns = [
                pa.array(column, type=field.type) for column, field in zip(zip(*page, strict=True), schema, strict=True)
            ]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))
            num_rows += len(page)
    unfinished.replace(path)
    return num_rows
