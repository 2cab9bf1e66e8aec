"""A stand-in for the C++ engine with two lanes on a clock of its own, so that rates can be checked exactly."""

import torch

from lmswap.execute._C import TransferRecord


class FakeEngine:
    """Copies take ``latency + nbytes / rate`` seconds alone; while both lanes run each keeps ``share`` of its speed."""

    def __init__(self, out_rate, in_rate, share, latency=0.0):
        self.rates, self.share, self.latency = {False: out_rate, True: in_rate}, share, latency
        self.clock, self.waiting, self.records, self.count = 0.0, {False: [], True: []}, [], 0

    def out_start(self, swap, tier, offset, pointer, nbytes, stream):  # noqa: PLR0917 - the engine's own signature
        self._queue(False, nbytes)
        return torch.tensor(self.count).__dlpack__()

    def in_start(self, swap, handle, pointer, nbytes, stream):
        self._queue(True, nbytes)
        return self.count

    def out_done(self, handle, stream):
        self._run()

    def in_done(self, transfer, stream):
        self._run()

    def take_records(self):
        taken, self.records = self.records, []
        return taken

    def _queue(self, is_in, nbytes):
        self.count += 1
        self.waiting[is_in].append([nbytes, self.latency + nbytes / self.rates[is_in], None])

    def _run(self):
        """Lets both lanes work until they are empty, from one end of a copy to the next."""
        while any(self.waiting.values()):
            busy = [lane for lane, jobs in self.waiting.items() if jobs]
            speed = self.share if len(busy) == 2 else 1.0
            step = min(self.waiting[lane][0][1] for lane in busy) / speed
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
