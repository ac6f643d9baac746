"""Makes the tables of the published results again, from their runs and what these say of each user: make tables"""

from __future__ import annotations

from pathlib import Path

import evidence
import where

from ctr_pe.study.differences import settings
from ctr_pe.study.files import write_files
from ctr_pe.study.store import FILE, Store

RESULTS = Path(__file__).parent / "results"


def main(results: Path = RESULTS) -> None:
    for file in sorted(results.glob(f"*/{FILE}")):
        store = Store(file.parent)
        print(f"{store.path.name}: {', '.join(write_files(store, settings(store)))}")
        if any((store.path / "users").glob(f"*{where.FACTS}")):
            where.write(store.path)


if __name__ == "__main__":
    main()
    evidence.main()
