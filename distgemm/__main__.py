"""``python -m distgemm``"""

from distgemm.cli import main

if __name__ == "__main__":
    main()
