"""The audit read model: what the journal says, as rows that SQL can ask.

`schema` names the tables, `story` and `project` turn events into rows (pure), a writer per database puts them in, and
`catalogue` describes the views, which are the contract. Tables are an inner matter: they may change with every version.
"""
