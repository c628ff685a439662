"""Who may do what: identities, certificate files, revocation, rights, and the users of one host."""
