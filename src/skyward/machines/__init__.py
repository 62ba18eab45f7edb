"""Getting and releasing machines: offers, selection, ledger, watchdog, replacement."""

__all__: list[str] = []
