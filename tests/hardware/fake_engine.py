"""A stand-in for the C++ engine with two lanes on a clock of its own, so that rates can be checked exactly."""

import torch

from lmswap.runtime._C import TransferRecord


class FakeEngine:
    """Copies take ``latency + nbytes / rate`` seconds alone; while both lanes run each keeps ``share`` of its speed.

    `compute` runs beside copies: they keep ``beside[0]`` of their speed, it keeps ``beside[1]`` of its own.
    """

    def __init__(self, out_rate, in_rate, share, latency=0.0, beside=(1.0, 1.0)):
        self.rates, self.share, self.latency, self.beside = {False: out_rate, True: in_rate}, share, latency, beside
        self.clock, self.waiting, self.records, self.count = 0.0, {False: [], True: []}, [], 0

    def out_start(self, swap, tier, offset, pointer, nbytes, stream):  # noqa: PLR0917 - the engine's own signature
        self._queue(False, nbytes)
        return torch.tensor(self.count).__dlpack__()

    def in_start(self, swap, handle, pointer, nbytes, stream):
        self._queue(True, nbytes)
        return self.count

    def out_done(self, handle, stream):
        self._run()

    def in_done(self, handle, transfer, stream):
        self._run()

    def is_idle(self):
        return not any(self.waiting.values())

    def take_records(self):
        taken, self.records = self.records, []
        return taken

    def compute(self, count, run_seconds=2.0**-6):
        """Runs something ``count`` times; the seconds that it took."""
        started, left = self.clock, count * run_seconds
        copy_speed, compute_speed = self.beside
        copying = sum(job[1] for jobs in self.waiting.values() for job in jobs) / copy_speed
        beside = min(copying, left / compute_speed)
        self._run(copy_speed, until=self.clock + beside)
        self.clock = started + beside + left - beside * compute_speed
        return self.clock - started

    def _queue(self, is_in, nbytes):
        self.count += 1
        self.waiting[is_in].append([nbytes, self.latency + nbytes / self.rates[is_in], None])

    def _run(self, beside=1.0, until=float("inf")):
        """Lets both lanes work until they are empty, from one end of a copy to the next."""
        while any(self.waiting.values()) and self.clock < until:
            busy = [lane for lane, jobs in self.waiting.items() if jobs]
            speed = beside * (self.share if len(busy) == 2 else 1.0)
            step = min(min(self.waiting[lane][0][1] for lane in busy) / speed, until - self.clock)
            for lane in busy:
                job = self.waiting[lane][0]
                job[1] -= step * speed
                job[2] = self.clock if job[2] is None else job[2]
            self.clock += step
            for lane in busy:
                nbytes, left, start = self.waiting[lane][0]
                if left < 1e-12:
                    self.waiting[lane].pop(0)
                    self.records.append(TransferRecord(0, lane, nbytes, start, start, self.clock, 0.0, 0.0))
