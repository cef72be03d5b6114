"""Reports of a run: files, tables, figures, progress.

Knows the calibration's plans and results; does not know how anything was computed. What is a single
method's own lies beside the method.
"""

from .errors import ReportError, UnwritableDirectoryError
from .files import (
    atomic_file,
    read_json,
    require_writable,
    write_bytes,
    write_figure,
    write_json,
    write_text,
)
from .progress import RichProgress, survives
from .run_report import (
    FORMAT_VERSION,
    Machine,
    ModelIdentity,
    RunReport,
    RunStatus,
    TaskData,
    collect_versions,
    describe_machine,
    report_name,
)
from .tables import summary_table

__all__ = [
    "FORMAT_VERSION",
    "Machine",
    "ModelIdentity",
    "ReportError",
    "RichProgress",
    "RunReport",
    "RunStatus",
    "TaskData",
    "UnwritableDirectoryError",
    "atomic_file",
    "collect_versions",
    "describe_machine",
    "read_json",
    "report_name",
    "require_writable",
    "summary_table",
    "survives",
    "write_bytes",
    "write_figure",
    "write_json",
    "write_text",
]
