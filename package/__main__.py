"""The command line, as `python -m llmopt`."""

from llmopt.cli.main import main

if __name__ == "__main__":
    main()
