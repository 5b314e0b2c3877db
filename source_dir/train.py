"""Container entry, the same in every place: `python train.py --config job.yaml`."""

from stoker.entry.main import main

if __name__ == "__main__":
    main()
