"""`python -m gangline.cli`: the same as `gang`, for an environment whose scripts are not on PATH."""

from gangline.cli.main import main

if __name__ == "__main__":
    main()
