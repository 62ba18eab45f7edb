"""Files on nodes: data that is sent once, results that are brought home, and where bodies start.

python 21_files.py                          on this computer
python 21_files.py gpu1 user@10.0.0.7:2222  on your own machines
"""

import argparse
import csv
import os
import tempfile
from pathlib import Path

import skyward as sky


@sky.compute
def summarize(year: int) -> float:
    """Reads a file that was pushed and writes one that is pulled, both by relative paths."""
    with open(f"sales/{year}.csv") as file:
        total = sum(float(row["amount"]) for row in csv.DictReader(file))
    os.makedirs("reports", exist_ok=True)
    Path(f"reports/{year}.txt").write_text(f"{year}: {total:.2f}\n")
    return total


def make_data(folder: Path) -> None:
    for year in (2023, 2024, 2025):
        rows = "".join(f"{day},{day * 1.5}\n" for day in range(year % 100))
        folder.mkdir(exist_ok=True)
        (folder / f"{year}.csv").write_text("day,amount\n" + rows)


def main() -> None:
    """Push a folder, compute with it, pull what came of it, and push again what has changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hosts", nargs="*", help="machines that you can log in to with ssh")
    args = parser.parse_args()
    provider, nodes = (sky.SSH(hosts=args.hosts), None) if args.hosts else (sky.Local(), 2)
    with tempfile.TemporaryDirectory() as home:
        os.chdir(home)  # nodes on this computer work where the program works
        data = Path(home, "downloads", "sales")
        data.parent.mkdir()
        make_data(data)
        with sky.ComputePool(provider=provider, nodes=nodes) as pool:
            sent = pool.push(data, "sales")
            print(f"{sent.files} files sent, {sent.bytes} bytes")

            totals = list(pool.map(summarize, [2023, 2024, 2025]))
            print([round(total, 2) for total in totals])

            pool.pull("reports", "results")
            for report in sorted(Path("results").glob("node-*/*.txt")):
                print(report, report.read_text().strip())

            (data / "2025.csv").write_text("day,amount\n1,100\n")
            again = pool.push(data, "sales")
            print(f"{again.files} file sent, {again.unchanged} unchanged; 2025 is {summarize(2025) >> pool} now")
        os.chdir("/")


if __name__ == "__main__":
    main()
