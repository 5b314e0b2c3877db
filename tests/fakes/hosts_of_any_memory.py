"""Ray's fake provider of hosts, whose types may say how much memory they have, as those of a cloud do."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Provider(FakeMultiNodeProvider):
    def create_node_with_resources_and_labels(
        self, config: Any, tags: Any, count: int, resources: dict[str, Any], labels: Any
    ) -> Any:
        # Ray finds the host's memory itself.
        own = {name: value for name, value in resources.items() if name != "memory"}
        return super().create_node_with_resources_and_labels(config, tags, count, own, labels)
