"""A pool in virtual time: the real logic of client, agents and runners over links, processes and a clock that a seed
drives. `python -m tests.simulation SEED` replays one run with its trace."""
