"""What runs on a machine: keeper, fork server, agent and runners."""

__all__: list[str] = []
