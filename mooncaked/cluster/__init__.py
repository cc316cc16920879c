"""The control plane on etcd: session, watches, leases, registration, election."""

import os

# What gRPC has to say about connections is in the errors and logs of this package. Its own lines on stderr
# only repeat it; it reads this when it is first imported, which only modules of this package do.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
