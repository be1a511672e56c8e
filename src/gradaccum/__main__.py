"""`python -m gradaccum`."""

from gradaccum.front import main

main()
