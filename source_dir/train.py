"""Container entry, the same in every place: `python train.py --config job.yaml`.

A recipe may have a module of this name beside it. It is staged as `train.own.py`, and `import train` runs it.
"""

from pathlib import Path

OWN = Path(__file__).with_name("train.own.py")

if __name__ == "__main__":
    from stoker.entry.main import main

    main()
elif __name__ == "train" and OWN.is_file():
    __file__ = str(OWN)
    exec(compile(OWN.read_bytes(), __file__, "exec"))  # noqa: S102 - the user's own code
