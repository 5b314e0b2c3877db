"""Starts the command line: `python launcher/submit.py CONFIG [key=value …] [--on PLACE]`."""

from stoker_launcher import refuse_absent

if __name__ == "__main__":
    refuse_absent()
    from stoker_launcher.command_line import main

    main()
