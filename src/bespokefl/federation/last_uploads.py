"""What clients sent last, so that methods are also scored by what a client holds before the server averages.

A client's model is often made of something that the server sends: the average of what clients sent. With the client's
own last upload in its place it is the model *before aggregation*, for whatever method, and like is compared with like.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bespokefl.core.program import Call, Rows
from bespokefl.core.tree_io import pack, unpack
from bespokefl.core.trees import Tree, rows
from bespokefl.federation.states import ClientStates


class LastSent:
    """By the name of the download that an upload started from: every client's last one."""

    def __init__(self, sends: Mapping[str, str | None]) -> None:
        self._downloads = {upload: download for upload, download in sends.items() if download is not None}
        self.by_download: dict[str, ClientStates] = {}

    def note(self, clients: Rows, uploads: Mapping[str, Tree]) -> None:
        for upload, download in self._downloads.items():
            if upload in uploads:
                if download not in self.by_download:
                    self.by_download[download] = ClientStates(rows(uploads[upload], 0))
                self.by_download[download].scatter(clients, uploads[upload])

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """For a checkpoint: JSON, and tensors by name."""
        described: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for download, states in self.by_download.items():
            structure, named = pack(states.rows(), f"sent {download}")
            described[download] = {"clients": states.clients, "rows": structure}
            tensors |= named
        return described, tensors

    def restore(self, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        for download, stored in described.items():
            stacked = unpack(stored["rows"], tensors, {})
            self.by_download[download] = ClientStates(rows(stacked, 0))
            self.by_download[download].load(stored["clients"], stacked)

    def instead(self, call: Call, clients: Rows) -> Call:
        """The call with each client's own upload where it would get the server's; a client that never took part, and
        so has none, gets the server's."""
        own = {
            name: self.by_download[name].gather(clients, otherwise=value)
            for name, value in call.shared.items()
            if name in self.by_download
        }
        shared = {name: value for name, value in call.shared.items() if name not in own}
        return call._replace(shared=shared, per_client={**call.per_client, **own})
