"""Credentials that expire while a receiver and a writer run, and are renewed."""

from __future__ import annotations

import threading

import pytest
import training

from deltastore import Writer
from deltastore.errors import AccessDenied, DeltastoreError
from deltastore.storage.faults import FaultKind
from receiver.daemon import Receiver
from receiver.options import Options
from receiver.status import Status
from tools.chaos.proxy import running_proxy
from tools.chaos.rules import Rule

pytestmark = pytest.mark.s3

EXPIRED = [Rule(kind=FaultKind.DENY)]


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_follower_keeps_what_it_has_and_goes_on_once_they_are_renewed(client, s3, tmp_path):
    snapshots = [training.small_snapshot(number) for number in range(3)]
    base = training.save(tmp_path / "base", snapshots[0])
    url, live = f"{s3.url}/expired-{client}", tmp_path / "live"
    with (
        running_proxy(s3.endpoint) as (proxy, endpoint),
        Writer(url, base=base, storage_options=s3.storage_options) as writer,
    ):
        writer.publish(snapshots[1]).result()
        options = {**s3.storage_options, "client": client, "endpoint_url": endpoint}
        status = Status(store=url, checkpoint=str(live), target="latest")
        receiver = Receiver(Options(store=url, checkpoint=live, poll=0.05, storage_options=options), status)
        thread = threading.Thread(target=receiver.run)
        thread.start()
        try:
            training.until(lambda: status.version == 1)
            proxy.play(EXPIRED)
            training.until(lambda: isinstance(status.error, AccessDenied))
            assert "renew" in status.error.hint
            writer.publish(snapshots[2]).result()
            training.assert_holds(live, snapshots[1])
            assert thread.is_alive()
            proxy.play([])
            receiver.wake()
            training.until(lambda: status.version == 2)
            training.assert_holds(live, snapshots[2])
        finally:
            receiver.stop()
            thread.join()


@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_a_publish_is_refused_and_the_next_one_goes_on(client, s3, tmp_path):
    snapshots = [training.small_snapshot(number) for number in range(3)]
    base = training.save(tmp_path / "base", snapshots[0])
    with running_proxy(s3.endpoint) as (proxy, endpoint):
        options = {**s3.storage_options, "client": client, "endpoint_url": endpoint}
        with Writer(f"{s3.url}/refused-{client}", base=base, storage_options=options) as writer:
            # Refused while parts go up; then at the manifest, which leaves the commit in doubt.
            for path in ("/parts/", "/manifests/"):
                proxy.play([Rule(kind=FaultKind.DENY, path=path)])
                with pytest.raises(DeltastoreError) as caught:
                    writer.publish(snapshots[1]).result()
                assert "renew" in caught.value.hint
            proxy.play([])
            published = writer.publish(snapshots[2]).result()
            writer.store.restore(published.version, tmp_path / "restored")
    training.assert_holds(tmp_path / "restored", snapshots[2])
