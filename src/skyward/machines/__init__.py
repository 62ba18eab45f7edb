"""Getting machines and giving them back: offers, selection, ledger, watchdog, replacement."""

__all__: list[str] = []
