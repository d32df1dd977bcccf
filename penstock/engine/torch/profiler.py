"""PyTorch's profiler: a trace of host and device, for chrome://tracing or Perfetto."""

from __future__ import annotations

from torch.profiler import ProfilerActivity, profile


class TorchProfiler:
    """Records from :meth:`start` to :meth:`stop`, in memory: for seconds rather than minutes."""

    def __init__(self, device_type: str) -> None:
        self._activities = [ProfilerActivity.CPU]
        if device_type == "cuda":
            self._activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = None

    def start(self) -> None:
        # there is one cycle of events; PyTorch 2.11 warns that it forgets those of cycles before
        self._profile = profile(activities=self._activities, acc_events=True)
        self._profile.start()

    def stop(self, stem: str) -> str:
        """Write the file ``stem`` plus a suffix; returns its path. Raises ValueError when no profile is being
        recorded."""
        if self._profile is None:
            raise ValueError("no profile is being recorded")
        recorded, self._profile = self._profile, None
        recorded.stop()
        path = f"{stem}.trace.json.gz"
        recorded.export_chrome_trace(path)
        return path
