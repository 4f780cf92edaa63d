package sim

import "math"

// abandon gives up a prefill that is kept for another instance: the owner's instance does it itself.
func (in *instance) abandon(job *request) {
	in.kept = drop(in.kept, job)
	in.remove(job)
	r := job.owner
	r.job, r.remote = nil, false
	r.at.waitingValid = false
	r.at.blocked = false
	in.c.tell(TransferAbandoned, r, in, 0)
	in.c.push(event{seconds: in.c.now, kind: eventPoke, instance: int32(r.at.index)})
}

// fetch starts the transfer of what r's prompt lacks here from where it was prefilled.
func (in *instance) fetch(r *request, cached, moved int) {
	source := r.job.at
	source.kept = drop(source.kept, r.job)
	loaded := len(in.batch) > 0 || len(source.batch) > 0 || in.transfers > 0 || source.transfers > 0
	in.transfers++
	source.transfers++
	bytes := float64(moved) * in.profile.KVBytesPerToken
	r.TransferTokens = moved
	r.TransferSeconds = math.Max(in.profile.Transfer.Seconds(bytes, loaded), source.profile.Transfer.Seconds(bytes, loaded))
	r.computed = cached
	in.move(r, transferring)
	in.c.tell(TransferStarted, r, in, moved)
	in.c.push(event{seconds: in.c.now + r.TransferSeconds, kind: eventTransfer, request: r})
}

// fetched ends a transfer: the source's blocks are given back, the request is ready for its
// last prompt token.
func (in *instance) fetched(r *request) {
	source := r.job.at
	in.transfers--
	source.transfers--
	source.remove(r.job)
	r.job, r.remote = nil, false
	if r.cancelled {
		in.remove(r)
		in.c.end(r, Cancelled)
	} else {
		r.computed = r.Request.PromptTokens - 1
		r.goal = r.Request.PromptTokens
		in.sync()
		in.publish(r, r.computed)
		in.move(r, ready)
		in.ready = append(in.ready, r)
		in.c.tell(TransferEnded, r, in, r.TransferTokens)
	}
	source.poke()
	in.poke()
}
