"""Run the command line as `python -m rtopk`."""

from rtopk.tools.cli import main

if __name__ == "__main__":
    main()
