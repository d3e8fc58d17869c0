"""The runs that come with the package: short stretches of real jobs (class profile), each with its truth, and the whole logs they are from.

    runs = robustrl.corpus()            runs["trainer-hang-1"]          runs.of(seed=1)         runs["whole-1.1"], the long ones

Recorded by scripts/record_corpus.py on a shared machine of two cores. A name ends with the seed of its job. Each stretch is an excerpt of
a log that is here whole, so that it can be audited. Chain values follow from the entries, so the files do without them: they are computed
anew, and the last one must be that of the recording. In part 1 of a job thresholds are minutes and no silence is repaired; in part 2
the job repairs what it finds.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from ..core import events as ev
from ..errors import ConfigError
from ..tables import Table
from .run import Run

FOLDER = Path(__file__).parent / "recorded"
CONTENTS = "contents.json"


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table of contents. Seconds count from the log's first entry."""

    name: str
    about: str
    file: str
    seed: int
    part: int
    start: float
    end: float


class Contents(msgspec.Struct, frozen=True, kw_only=True):
    files: dict[str, str]
    """Name -> chain value of its last entry."""
    runs: list[Stretch]


class Corpus(Mapping[str, Run]):
    """Name -> run; each is read when it is asked for."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder = folder
        self.contents = msgspec.json.decode((folder / CONTENTS).read_bytes(), type=Contents)
        self._stretches = {found.name: found for found in self.contents.runs}
        self._logs: dict[str, Run] = {}
        self._runs: dict[str, Run] = {}

    def __getitem__(self, name: str) -> Run:
        if name in self._runs:
            return self._runs[name]
        if name not in self._stretches:
            raise ConfigError("name", name, f"must be one of {', '.join(self)}")
        found = self._stretches[name]
        log = self._log(found.file)
        whole = found.start == 0 and found.end >= log.seconds
        self._runs[name] = log if whole else log.excerpt(found.start, min(found.end, log.seconds), name)
        return self._runs[name]

    def of(self, *, seed: int | None = None, part: int | None = None, whole: bool = False) -> list[Run]:
        """The stretches of one seed or part; with ``whole`` the long logs instead."""
        return [self[found.name] for found in self._stretches.values()
                if seed in (None, found.seed) and part in (None, found.part) and whole == found.name.startswith("whole")]  # fmt: skip

    @property
    def seeds(self) -> list[int]:
        return sorted({found.seed for found in self._stretches.values()})

    def _log(self, file: str) -> Run:
        if file not in self._logs:
            entries = read_log(self.folder / file)
            if entries[-1].chain != self.contents.files[file]:
                raise ConfigError("corpus", file, "is not the log that was recorded: its chain does not end as the table of contents says")
            name = next(found.name for found in self._stretches.values() if found.file == file and found.name.startswith("whole"))
            self._logs[file] = Run.of(entries, name)
        return self._logs[file]

    def __iter__(self) -> Iterator[str]:
        return iter(self._stretches)

    def __len__(self) -> int:
        return len(self._stretches)

    def table(self) -> Table:
        return Table({"name": found.name, "seconds": round(found.end - found.start, 1), "about": found.about}
                     for found in self._stretches.values())  # fmt: skip

    def __repr__(self) -> str:
        return f"<corpus of {len(self)} runs: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def write_log(path: Path, entries: Iterable[ev.Entry]) -> None:
    """Without chain values, as xz: a third of what gzip makes of them."""
    lines = (ev.encoder.encode(msgspec.structs.replace(entry, chain="")) + b"\n" for entry in entries)
    path.write_bytes(lzma.compress(b"".join(lines), preset=9 | lzma.PRESET_EXTREME))


def read_log(path: Path) -> list[ev.Entry]:
    """With chain values. Raises ConfigError."""
    try:
        lines = lzma.decompress(path.read_bytes()).splitlines()
        bare = [ev.entry_decoder.decode(line) for line in lines]
    except (OSError, lzma.LZMAError, msgspec.DecodeError) as error:
        raise ConfigError("corpus", path.name, f"cannot be read: {error}") from error
    entries: list[ev.Entry] = []
    chain = ev.GENESIS
    for entry in bare:
        sealed, _ = ev.seal(entry, chain)
        entries.append(sealed)
        chain = sealed.chain
    return entries


@cache
def corpus() -> Corpus:
    """The bundled runs, by name."""
    return Corpus()
