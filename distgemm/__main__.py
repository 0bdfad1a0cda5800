"""``python -m distgemm``"""

from distgemm.cli.main import main

if __name__ == "__main__":
    main()
