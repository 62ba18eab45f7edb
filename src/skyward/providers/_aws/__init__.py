"""The parts of the AWS provider; `skyward.providers.aws` puts them together."""

__all__: list[str] = []
