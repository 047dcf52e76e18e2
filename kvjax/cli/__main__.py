"""`python -m kvjax.cli`."""

from kvjax_command import command

if __name__ == "__main__":
    command()
