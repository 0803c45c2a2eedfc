"""Compress outgoing messages: the model in each is replaced by a `downlink` update and our header."""

from collections.abc import Mapping

from flwr.app import Array, ArrayRecord, ConfigRecord, Message

from rtopk.flower.downlink import Kind, Versions
from rtopk.flower.intake import pack_table
from rtopk.flower.records import PAYLOAD, Model, payload_array, the_arrays, with_header
from rtopk.flower.roster import Roster
from rtopk.flower.transaction import NOTHING


class Sender:
    """Write the messages of one exchange."""

    def __init__(
        self,
        model: Model,
        versions: Versions,
        roster: Roster,
        accepted: Mapping[str, int],
        raw: Mapping[str, Array],
    ) -> None:
        self.model, self.versions, self.roster = model, versions, roster
        self.accepted, self.raw = accepted, raw
        self._table = pack_table(accepted)
        self._wrapped: dict[int, Array] = {}  # payloads for many clients are wrapped once

    def dress(self, message: Message, stamp: Mapping[str, int]) -> Kind:
        """Replace the model in a message by what its node needs; return what that was."""
        node = message.metadata.dst_node_id
        update = self.versions.since(self.roster.version_of(node, self.versions.version))
        header = ConfigRecord(
            {
                **stamp,
                "kind": update.kind,
                "base": update.base,
                "version": update.version,
                "digest": update.digest,
                "lossless": self.versions.lossless,
                "fingerprint": self.model.layout.fingerprint.to_bytes(8, "little"),
            }
        )
        if node in self.roster.clients:
            header["accepted"] = self.accepted.get(self.roster.clients[node], NOTHING)
        else:
            header["table"] = self._table
        if update.kind == "snapshot":
            header["model"] = self.model.to_json()
        elif self.roster.is_new(node):
            header["dense"] = "\n".join(self.model.dense)
        payloads = {}
        for number, payload in enumerate(update.payloads):
            if id(payload) not in self._wrapped:
                self._wrapped[id(payload)] = payload_array(payload)
            payloads[f"{PAYLOAD}{number}"] = self._wrapped[id(payload)]
        name, _ = the_arrays(message.content)
        arrays = ArrayRecord({**payloads, **self.raw})
        message.content = with_header(message.content, header, **{name: arrays})
        return update.kind
