"""`python -m docs.tables` writes the measured tables and the picture of README.md and docs/."""

from docs.tables import main

if __name__ == "__main__":
    main()
