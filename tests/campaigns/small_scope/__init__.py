"""Small scope: every order of a few records (:mod:`.records`), and of a few moves of real members (:mod:`.engine`)."""
