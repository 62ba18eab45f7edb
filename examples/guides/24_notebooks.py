"""A notebook, cell by cell: a pool that stays open, progress, warnings. Editors that know `# %%` run it in cells.

python examples/guides/24_notebooks.py
"""

# %% functions of a cell travel with the calls that use them
import time
import warnings

import skyward as sky


@sky.compute
def simulate(n: int) -> int:
    time.sleep(0.05)
    return n * n


@sky.compute
def train(steps: int) -> float:
    loss = 1.0
    for step in range(1, steps + 1):
        time.sleep(0.02)
        loss *= 0.9
        sky.progress(step, steps, loss=loss)
    if loss > 0.01:
        warnings.warn("the loss is still high", stacklevel=1)
    return loss


# %% a pool that later cells use
pool = sky.ComputePool(nodes=2, name="notebook").open()

# %% one line for the group, which is brought up to date in place
squares = sky.gather(*(simulate(n) for n in range(40))) >> pool
print(sum(squares))

# %% bodies that say how far they are: one line for each node
losses = train(20) @ pool
print([round(loss, 3) for loss in losses])

# %% without waiting: the group goes on while other cells run
later = sky.gather(*(simulate(n) for n in range(40))) > pool

# %%
print(sum(later.result()))

# %% no progress, and no such warning
warnings.filterwarnings("ignore", message="the loss is still high")
quiet = sky.gather(*(train(5) for _ in range(4)), progress=False) >> pool

# %% everything is given back
pool.close()
