"""The holder's side of a transfer: pages pinned and sent, until they are there or it is broken off."""

from collections.abc import Sequence as SequenceOf

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.page_exports import Export, ExportId, PageExports
from pageray.cluster.simulation.event_loop import Future
from pageray.cluster.simulation.shared_line import SharedLine


class TransferError(Exception):
    """A transfer has failed; its blocks must not be trusted."""


class Push:
    """Open until its bytes are sent, or `stop`."""

    def __init__(self, pushes: "Pushes", export: Export, num_blocks: int) -> None:
        self._pushes = pushes
        self.export_id = export.export_id
        self.num_blocks = num_blocks
        self.ended: Future[int] = Future()
        """The number of blocks that are there."""
        self.line_number, sent = pushes.line.send(num_blocks * pushes.block_bytes)
        sent.on_done(self._complete)

    def stop(self, reason: str) -> None:
        """Nothing is in flight afterwards. No harm if it has ended."""
        if not self.ended.is_done:
            self._pushes.line.stop(self.line_number)
            self._pushes.close(self.export_id)
            self.ended.set_exception(TransferError(reason))

    def _complete(self) -> None:
        if not self.ended.is_done:
            self._pushes.close(self.export_id)
            self.ended.set_result(self.num_blocks)


class Pushes:
    """All pushes of one engine."""

    def __init__(self, exports: PageExports, line: SharedLine, block_bytes: int) -> None:
        self._exports = exports
        self._open: dict[ExportId, Push] = {}
        self.line = line
        self.block_bytes = block_bytes

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, contents: SequenceOf[BlockContent], first: int, max_blocks: int) -> Push | None:
        """Send what is published here of `contents[first:]`; None when that is nothing."""
        export = self._exports.open(contents, first)
        if export is None:
            return None
        push = Push(self, export, min(max_blocks, len(export.block_ids)))
        self._open[export.export_id] = push
        return push

    def close(self, export_id: ExportId) -> None:
        del self._open[export_id]
        self._exports.close(export_id)

    def break_all(self) -> None:
        """The engine is gone."""
        for push in list(self._open.values()):
            push.stop("The holder died.")
