"""Writing the read model: each batch of rows in one transaction with the checkpoint that says how far it goes.

So a kill at any statement leaves a batch entirely or not at all, and whoever goes on reads where that was. Two writers may run at
once (an engine, a follower, a command that catches up): a batch names the checkpoint that it continues, and finds it moved if
somebody else was there first. Then it is given up, and nothing is in twice.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, NamedTuple

from refold.projections.audit.parts import IN_SQLITE
from refold.projections.audit.rows import Change
from refold.projections.audit.schema import FACTS, PROJECTION_VERSION, PROJECTIONS, Mode, Table

GENESIS = "00" * 32
_DROP_AT_ONCE = 2_000


class Checkpoint(NamedTuple):
    """A row of `audit_projections`, but for the saved story.

    Attributes:
        projection_id: key of the projection.
        stream: what it renders.
        version: `PROJECTION_VERSION` of the code that made it.
        is_live: 1 if the views show it, 0 if it is being built, -1 if another has taken its place.
        position: of the next record to project.
        head_hash: hex, of the last record projected.
        engine_epoch: of that record.
        time_ns: of that record; 0 if there is none.
        num_events: projected so far.
        num_request_events: as `num_events`, an event counted once for each request that it concerns.
        journal_head: where the stream's head was when the projection last went on.
        state_position: which position the saved story is for.
        damage: what is wrong with the record at `damage_position`, which nothing can be projected behind; None if nothing is.
        damage_position: see `damage`.
    """

    projection_id: int
    stream: str
    version: int = PROJECTION_VERSION
    is_live: int = 1
    position: int = 0
    head_hash: str = GENESIS
    engine_epoch: int = 0
    time_ns: int = 0
    num_events: int = 0
    num_request_events: int = 0
    journal_head: int = 0
    state_position: int = 0
    damage: str | None = None
    damage_position: int | None = None


_FIELDS = ", ".join(Checkpoint._fields)


@lru_cache(maxsize=128)
def insert_sql(table: Table, mode: Mode, mark: str) -> str:
    """The statement that puts a row in; `mark` is the driver's placeholder."""
    values = ", ".join([mark] * len(table.columns))
    sql = f"INSERT INTO {table.name} ({', '.join(table.names)}) VALUES ({values})"  # noqa: S608 - our own names
    if mode == "insert":
        return sql
    rest = [name for name in table.names if name not in table.key]
    sets = ", ".join(f"{name} = {_merged(table.name, name, mode)}" for name in rest)
    return f"{sql} ON CONFLICT ({', '.join(table.key)}) DO UPDATE SET {sets}"


def _merged(table: str, name: str, mode: Mode) -> str:
    if mode == "replace":
        return f"excluded.{name}"
    if name.startswith("max_"):
        return f"CASE WHEN excluded.{name} > {table}.{name} THEN excluded.{name} ELSE {table}.{name} END"
    return f"{table}.{name} + excluded.{name}"


class AuditWriter(ABC):
    """Writes read models into one database. One thread at a time.

    Every method raises `JournalError` if the database fails.
    """

    mark = "?"
    lock_row = ""
    parts_sql = IN_SQLITE

    # -- what a database brings ---------------------------------------------------------------------------------------

    @abstractmethod
    def transaction(self, *, lock_all: bool = False) -> AbstractContextManager[None]:
        """A transaction that writes; `lock_all` keeps everybody else from adding projections."""

    @abstractmethod
    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """One statement, and its rows if it has any."""

    @abstractmethod
    def execute_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """One statement for each row."""

    @abstractmethod
    def close(self) -> None:
        """Free the connection. Idempotent."""

    def insert_new(self, table: Table, rows: Sequence[Sequence[Any]]) -> None:
        """Rows that are not there."""
        self.execute_many(insert_sql(table, "insert", self.mark), rows)

    def parts(self) -> set[str]:
        """The names of the tables and views that are there, those of others among them."""
        return {name for (name,) in self.execute(self.parts_sql)}

    # -- projections --------------------------------------------------------------------------------------------------

    def live(self, stream: str) -> Checkpoint | None:
        """The projection that the views show."""
        return self._find(stream, 1)

    def shadow(self, stream: str) -> Checkpoint | None:
        """A projection that is being built beside it."""
        return self._find(stream, 0)

    def retired(self, stream: str) -> list[Checkpoint]:
        """Those that nobody needs any more."""
        sql = f"SELECT {_FIELDS} FROM audit_projections WHERE stream = {self.mark} AND is_live = -1"  # noqa: S608
        return [Checkpoint._make(row) for row in self.execute(sql, (stream,))]

    def begin(self, stream: str, *, is_live: bool) -> Checkpoint:
        """A new projection, empty; or the one that somebody else has begun meanwhile."""
        with self.transaction(lock_all=True):
            there = self._find(stream, int(is_live))
            if there is not None:
                return there
            new = Checkpoint(self._last_id() + 1, stream, is_live=int(is_live))
            marks = ", ".join([self.mark] * len(new))
            self.execute(f"INSERT INTO audit_projections ({_FIELDS}) VALUES ({marks})", new)  # noqa: S608 - our own names
        return new

    def saved_story(self, checkpoint: Checkpoint) -> bytes | None:
        """The story as it was at the checkpoint's `state_position`; None if none was saved."""
        sql = f"SELECT state FROM audit_projections WHERE projection_id = {self.mark} AND state_position = {self.mark}"  # noqa: S608
        rows = self.execute(sql, (checkpoint.projection_id, checkpoint.state_position))
        return bytes(rows[0][0]) if rows and rows[0][0] is not None else None

    def commit(
        self,
        before: Checkpoint,
        after: Checkpoint,
        changes: Sequence[Change],
        redacted: Sequence[int] = (),
        story: bytes | None = None,
    ) -> bool:
        """Put the rows in and move the checkpoint from `before` to `after`; False if it isn't there (any more).

        `story` is saved if it's given: it belongs to `after.state_position`.
        """
        assert before.projection_id == after.projection_id, (before, after)
        with self.transaction():
            sql = f"SELECT position, is_live FROM audit_projections WHERE projection_id = {self.mark}{self.lock_row}"  # noqa: S608
            if self.execute(sql, (before.projection_id,)) != [(before.position, before.is_live)]:
                return False
            for table, mode, rows in changes:
                if mode == "insert":
                    self.insert_new(table, rows)
                else:
                    self.execute_many(insert_sql(table, mode, self.mark), rows)
            for handle in redacted:
                self.forget(before.projection_id, handle)
            self._move(after, story)
        return True

    def forget(self, projection_id: int, handle: int) -> None:
        """Forget what a request said."""
        where = f"WHERE projection_id = {self.mark} AND handle = {self.mark}"
        self.execute(f"UPDATE audit_tokens SET token_id = NULL {where}", (projection_id, handle))  # noqa: S608
        self.execute(f"UPDATE audit_requests SET is_redacted = 1 {where}", (projection_id, handle))  # noqa: S608

    def promote(self, shadow: Checkpoint) -> bool:
        """Show another projection of the stream, from one moment to the next; False if it isn't waiting (any more)."""
        assert not shadow.is_live, shadow
        with self.transaction(lock_all=True):
            if self._find(shadow.stream, 0) != shadow:
                return False
            self.execute(
                f"UPDATE audit_projections SET is_live = -1 WHERE stream = {self.mark} AND is_live = 1",  # noqa: S608
                (shadow.stream,),
            )
            self.execute(
                f"UPDATE audit_projections SET is_live = 1 WHERE projection_id = {self.mark}",  # noqa: S608
                (shadow.projection_id,),
            )
        return True

    def discard(self, projection_id: int) -> Iterator[int]:
        """Delete a projection that isn't shown, a few rows at a time; yields how many each time."""
        for table in FACTS:
            second = table.key[1]
            sql = (
                f"DELETE FROM {table.name} WHERE projection_id = {self.mark} AND {second} IN (SELECT {second} FROM "  # noqa: S608
                f"{table.name} WHERE projection_id = {self.mark} ORDER BY {second} LIMIT {_DROP_AT_ONCE}) "
            )
            count = f"SELECT COUNT(*) FROM (SELECT 1 FROM {table.name} WHERE projection_id = {self.mark} LIMIT {_DROP_AT_ONCE}) t"  # noqa: S608
            while (rows := self.execute(count, (projection_id,))[0][0]) > 0:
                with self.transaction():
                    self.execute(sql, (projection_id, projection_id))
                yield rows
        with self.transaction():
            self.execute(
                f"DELETE FROM audit_projections WHERE projection_id = {self.mark} AND is_live <> 1",  # noqa: S608
                (projection_id,),
            )

    def live_streams(self) -> list[str]:
        """The streams that the views show something of."""
        return [name for (name,) in self.execute("SELECT stream FROM audit_projections WHERE is_live = 1 ORDER BY 1")]

    def unlisted(self) -> list[int]:
        """Projections that have rows and aren't in `audit_projections`, from which somebody has deleted them. Nobody goes on with one."""
        found = {number for table in FACTS for number in self._ids_in(table)}
        listed = {
            number for (number,) in self.execute("SELECT projection_id FROM audit_projections")
        }  # last: some are new
        return sorted(found - listed)

    def _ids_in(self, table: Table) -> Iterator[int]:
        """The projections that have rows in a table, each found by the key."""
        sql = f"SELECT MIN(projection_id) FROM {table.name} WHERE projection_id > {self.mark}"  # noqa: S608 - our own names
        last = -1
        while (last := self.execute(sql, (last,))[0][0]) is not None:
            yield last

    def _last_id(self) -> int:
        """The largest that any row has: one that isn't listed any more isn't given again."""
        ids = [f"SELECT MAX(projection_id) AS id FROM {table.name}" for table in (PROJECTIONS, *FACTS)]  # noqa: S608
        ((last,),) = self.execute(f"SELECT COALESCE(MAX(id), 0) FROM ({' UNION ALL '.join(ids)}) AS t")  # noqa: S608
        return int(last)

    def _find(self, stream: str, is_live: int) -> Checkpoint | None:
        sql = (
            f"SELECT {_FIELDS} FROM audit_projections WHERE stream = {self.mark} AND is_live = {self.mark} "  # noqa: S608
            "ORDER BY projection_id DESC LIMIT 1"
        )
        rows = self.execute(sql, (stream, is_live))
        return Checkpoint._make(rows[0]) if rows else None

    def _move(self, after: Checkpoint, story: bytes | None) -> None:
        values = {name: value for name, value in after._asdict().items() if name != "projection_id"}
        if story is not None:
            values["state"] = story
        sets = ", ".join(f"{name} = {self.mark}" for name in values)
        self.execute(
            f"UPDATE audit_projections SET {sets} WHERE projection_id = {self.mark}",  # noqa: S608 - our own names
            (*values.values(), after.projection_id),
        )


assert {column.name for column in PROJECTIONS.columns} - {"state"} == set(Checkpoint._fields)
