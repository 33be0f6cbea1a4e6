"""What a run leaves behind: the record types, and the JSONL files that hold them.

A run folder holds `manifest.json` (what was asked and where it ran), `metrics/rank0000.jsonl` (one line per record)
and, written last, `COMPLETE`; with monitors `monitors/<host>.jsonl`, from a sweep `point.json` too. The loop writes
only records and `hvdtrain results` reads only records; nobody scrapes a log. Every line is one JSON object whose "type"
is a key of RECORDS. Times are in seconds, sizes in bytes; `null` means not measured, never 0. A resumed run appends: of
two records for the same step or epoch the later one counts.
"""

from hvdtrain.records.checks import from_json, make
from hvdtrain.records.files import (
    LONGEST_DOCUMENT_BYTES,
    LONGEST_LINE_BYTES,
    Writer,
    open_plain,
    read,
    read_document,
    read_lines,
    read_values,
    write_document,
)
from hvdtrain.records.types import (
    RECORDS,
    SCHEMA,
    Epoch,
    Manifest,
    Point,
    Record,
    Resumed,
    Sample,
    Saved,
    Sensors,
    Step,
    Summary,
    as_json,
    by_score,
    utc_now,
)

__all__ = [
    "LONGEST_DOCUMENT_BYTES",
    "LONGEST_LINE_BYTES",
    "RECORDS",
    "SCHEMA",
    "Epoch",
    "Manifest",
    "Point",
    "Record",
    "Resumed",
    "Sample",
    "Saved",
    "Sensors",
    "Step",
    "Summary",
    "Writer",
    "as_json",
    "by_score",
    "from_json",
    "make",
    "open_plain",
    "read",
    "read_document",
    "read_lines",
    "read_values",
    "utc_now",
    "write_document",
]
