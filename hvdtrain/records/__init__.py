"""The record types of a run, and the JSONL files that hold them.

A run folder holds `manifest.json` (settings and surroundings), `metrics/rank0000.jsonl` (one record per line) and,
written last, `COMPLETE`. Monitors add `monitors/<host>.jsonl`, a sweep adds `experiment.json`. The training loop writes
records and `hvdtrain results` reads them; nothing parses logs. Each line is a JSON object whose "type" is a key of
RECORDS. Times are in seconds, sizes in bytes; `null` means not measured and is never replaced by 0. A resumed run
appends: of two records of the same step or epoch, the later one counts.
"""

from hvdtrain.records.files import LONGEST_DOCUMENT_BYTES as LONGEST_DOCUMENT_BYTES
from hvdtrain.records.files import Writer as Writer
from hvdtrain.records.files import backwards as backwards
from hvdtrain.records.files import from_json as from_json
from hvdtrain.records.files import open_plain as open_plain
from hvdtrain.records.files import read as read
from hvdtrain.records.files import read_document as read_document
from hvdtrain.records.files import read_lines as read_lines
from hvdtrain.records.files import summary as summary
from hvdtrain.records.files import write_document as write_document
from hvdtrain.records.types import RECORDS as RECORDS
from hvdtrain.records.types import SCHEMA as SCHEMA
from hvdtrain.records.types import Chosen as Chosen
from hvdtrain.records.types import Epoch as Epoch
from hvdtrain.records.types import Experiment as Experiment
from hvdtrain.records.types import Manifest as Manifest
from hvdtrain.records.types import Record as Record
from hvdtrain.records.types import Resumed as Resumed
from hvdtrain.records.types import Sample as Sample
from hvdtrain.records.types import Saved as Saved
from hvdtrain.records.types import Sensors as Sensors
from hvdtrain.records.types import Step as Step
from hvdtrain.records.types import Summary as Summary
from hvdtrain.records.types import View as View
from hvdtrain.records.types import as_json as as_json
from hvdtrain.records.types import by_score as by_score
from hvdtrain.records.types import utc_now as utc_now
