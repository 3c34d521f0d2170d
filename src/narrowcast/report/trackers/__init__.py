"""Other programs that are told of a run as it goes on: TensorBoard, and W&B without a network."""

from narrowcast.report.trackers.opening import open_trackers, require_trackers
from narrowcast.report.trackers.tracker import Tracker, Trackers

__all__ = ["Tracker", "Trackers", "open_trackers", "require_trackers"]
