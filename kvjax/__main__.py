"""`python -m kvjax`, the command line if its script is not on the path."""

from kvjax_command import command

if __name__ == "__main__":
    command()
