"""All faults of the matrix by their names."""

from __future__ import annotations

from faults.cluster.faults_login import FAULTS as LOGIN
from faults.cluster.faults_machine import FAULTS as MACHINE
from faults.cluster.faults_network import FAULTS as NETWORK
from faults.cluster.faults_share import FAULTS as SHARE
from faults.cluster.faults_speed import FAULTS as SPEED
from faults.cluster.faults_start import FAULTS as START
from faults.cluster.faults_told_apart import FAULTS as TOLD_APART
from faults.cluster.matrix import Fault

FAULTS: dict[str, Fault] = {**LOGIN, **NETWORK, **SPEED, **MACHINE, **SHARE, **START, **TOLD_APART}
