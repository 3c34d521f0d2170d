"""The run folder and the records in it; the standard library only."""

from narrowcast.runs.environment import describe_environment
from narrowcast.runs.folder import RunFolder
from narrowcast.runs.records import (
    CheckpointRecord,
    EvalRecord,
    ExponentRecord,
    FindingRecord,
    HealthRecord,
    PrecisionRecord,
    Record,
    StepRecord,
    from_line,
    same_trajectory,
    to_line,
)

__all__ = [
    "CheckpointRecord",
    "EvalRecord",
    "ExponentRecord",
    "FindingRecord",
    "HealthRecord",
    "PrecisionRecord",
    "Record",
    "RunFolder",
    "StepRecord",
    "describe_environment",
    "from_line",
    "same_trajectory",
    "to_line",
]
