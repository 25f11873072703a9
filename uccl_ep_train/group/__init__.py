"""How ranks meet, agree, and leave: creation of a buffer, its domains and transport, its end."""
