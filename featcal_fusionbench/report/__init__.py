"""Reports of a run: files, tables, figures, progress.

Knows results, settings and the observer's protocol; does not know how anything was computed.
"""

from typing import TYPE_CHECKING, Any

from .drift import DriftChange, compare_drift, mean_final_drift, worsened, worsening_warning
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
    FeatCalReport,
    Machine,
    MergeReport,
    MergeSettings,
    MethodName,
    MethodSettings,
    ModelIdentity,
    ProbSurgeryReport,
    RepresentationSurgeryReport,
    RunReport,
    RunStatus,
    SurgeryReport,
    TaskData,
    collect_versions,
    describe_machine,
    report_name,
)
from .scalars import scalars
from .tables import (
    PlanEstimate,
    PlanRow,
    module_table,
    plan_table,
    render_text,
    summary_table,
)

if TYPE_CHECKING:
    from .figures import drift_figure

__all__ = [
    "FORMAT_VERSION",
    "DriftChange",
    "FeatCalReport",
    "Machine",
    "MergeReport",
    "MergeSettings",
    "MethodName",
    "MethodSettings",
    "ModelIdentity",
    "PlanEstimate",
    "PlanRow",
    "ProbSurgeryReport",
    "RepresentationSurgeryReport",
    "ReportError",
    "RichProgress",
    "RunReport",
    "RunStatus",
    "SurgeryReport",
    "TaskData",
    "UnwritableDirectoryError",
    "atomic_file",
    "collect_versions",
    "compare_drift",
    "describe_machine",
    "drift_figure",
    "mean_final_drift",
    "module_table",
    "plan_table",
    "read_json",
    "render_text",
    "report_name",
    "require_writable",
    "scalars",
    "summary_table",
    "survives",
    "worsened",
    "worsening_warning",
    "write_bytes",
    "write_figure",
    "write_json",
    "write_text",
]


def __getattr__(name: str) -> Any:
    """Import matplotlib only for a figure: its import fails where it finds no place to write to."""
    if name == "drift_figure":
        from .figures import drift_figure

        return drift_figure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
