// router: from the router's logits to the chosen experts: softmax over all, the TOP_K most probable (ties: the lower
// id), their probabilities made to sum to one, times each expert's scale (docs/MODEL.md, Layer, Router).
//
// logits   float [rows, EXPERTS]
// scale    float [EXPERTS]         per_expert_scale
// ids      int [rows, TOP_K]       by falling probability
// weights  float [rows, TOP_K]
//
// push: the _at of every binding. Groups: (rows); one workgroup a row. EXPERTS and TOP_K are specialisation constants.
// Reference: reference.router, from its logits on.
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint EXPERTS = 128;
layout(constant_id = 2) const uint TOP_K = 8;

layout(push_constant) uniform Push {
    uint logits_at;
    uint scale_at;
    uint ids_at;
    uint weights_at;
};

layout(std430, binding = 0) readonly buffer Logits { float logits[]; };
layout(std430, binding = 1) readonly buffer Scale { float scale[]; };
layout(std430, binding = 2) writeonly buffer Ids { int ids[]; };
layout(std430, binding = 3) writeonly buffer Weights { float weights[]; };

shared float probability[EXPERTS];
shared uint chosen[TOP_K];

void main() {
    const uint me = gl_LocalInvocationID.x, row = gl_WorkGroupID.x;
    for (uint e = me; e < EXPERTS; e += gl_WorkGroupSize.x) {
        probability[e] = logits[logits_at + row * EXPERTS + e];
    }
    barrier();
    float largest = probability[0];
    for (uint e = 1; e < EXPERTS; e++) {
        largest = max(largest, probability[e]);
    }
    barrier();
    for (uint e = me; e < EXPERTS; e += gl_WorkGroupSize.x) {
        probability[e] = exp(probability[e] - largest);
    }
    if (me < TOP_K) {
        chosen[me] = me;  // what remains if the logits are no numbers
    }
    barrier();
    // exp keeps the order of the logits, so that the sum is not needed: the weights are renormalised
    for (uint e = me; e < EXPERTS; e += gl_WorkGroupSize.x) {
        const float mine = probability[e];
        uint rank = 0;
        for (uint other = 0; other < EXPERTS; other++) {
            const float theirs = probability[other];
            rank += uint(theirs > mine || (theirs == mine && other < e));
        }
        if (rank < TOP_K && mine == mine) {
            chosen[rank] = e;
        }
    }
    barrier();
    if (me < TOP_K) {
        float sum = 0.0;
        for (uint j = 0; j < TOP_K; j++) {
            sum += probability[chosen[j]];
        }
        const uint e = chosen[me];
        ids[ids_at + row * TOP_K + me] = int(e);
        weights[weights_at + row * TOP_K + me] = probability[e] / sum * scale[scale_at + e];
    }
}
