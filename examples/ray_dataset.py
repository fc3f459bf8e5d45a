"""Generate answers for a dataset with Ray Data. Each of the ``--actors`` actors loads the model.

Without a cluster, Ray starts on this machine. With a cluster (``ray start``, RAY_ADDRESS), its nodes run the
actors.

    python examples/ray_dataset.py --output answers
"""

from __future__ import annotations

import argparse

import ray

import penstock.ray
from penstock import SamplingParams

COUNTRIES = ("Germany", "France", "Italy", "Spain", "Peru", "Japan")


def main() -> None:
    """Write the answers as Parquet files, and print the answers and their number."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", default="answers")
    parser.add_argument("--actors", type=int, default=1)
    options = parser.parse_args()
    rows = [
        {"messages": [{"role": "user", "content": f"What is the capital of {country}?"}]}
        for country in COUNTRIES
    ]
    answers = penstock.ray.generate(
        ray.data.from_items(rows),
        "demo",
        messages_column="messages",
        sampling_params=SamplingParams(temperature=0),
        concurrency=options.actors,
        num_cpus=1,
    )
    answers.write_parquet(options.output)
    stored_answers = ray.data.read_parquet(options.output)
    for row in stored_answers.take_all():
        print(row["generated_text"])
    print(f"{stored_answers.count()} answers in {options.output}")


if __name__ == "__main__":
    main()
