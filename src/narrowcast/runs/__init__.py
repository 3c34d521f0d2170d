"""The run folder and its records; uses only the standard library."""

from narrowcast.runs.environment import describe_environment, describe_machine
from narrowcast.runs.folder import RunFolder
from narrowcast.runs.records import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    Record,
    SampleRecord,
    StepRecord,
    StrategyRecord,
    from_line,
    same_trajectory,
    to_line,
)
from narrowcast.runs.report_section import ReportSection
from narrowcast.runs.task_info import Metric, TaskInfo

__all__ = [
    "CheckpointRecord",
    "EvalRecord",
    "ExponentRecord",
    "FindingRecord",
    "HealthRecord",
    "Metric",
    "PrecisionRecord",
    "Record",
    "ReportSection",
    "RunFolder",
    "SampleRecord",
    "StepRecord",
    "StrategyRecord",
    "TaskInfo",
    "describe_environment",
    "describe_machine",
    "from_line",
    "same_trajectory",
    "to_line",
]
