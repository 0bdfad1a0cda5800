"""``distgemm bench``: what is measured, by which methods, and what is made of the figures."""
