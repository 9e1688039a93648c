//! Recursors queried as by Consul: one after the other, until one returns NOERROR or NXDOMAIN.

use std::{net::SocketAddr, sync::Arc};

use futures::future::BoxFuture;
use hickory_proto::op::ResponseCode;

use dns_consul::config::Config as ConsulConfig;
use dns_core::{
    config::{CacheConfig, Config, RecursionConfig},
    wire::{Query, ReplyFlags, Transport, empty_reply},
};
use dns_upstream::{Answer, CachedSource, Upstream};

/// The recursors of the object `"consul"`.
struct Recursors {
    each: Vec<CachedSource>,
    /// Whether they are queried in random order instead of the configured order.
    random: bool,
}

/// Returns the recursors of the object `"consul"`; `None` if it names none. `own` lists this
/// server's listen addresses. Must be called inside a tokio runtime.
pub(crate) fn recursors_of(
    consul: &ConsulConfig,
    config: &Config,
    own: &[SocketAddr],
) -> Option<Arc<dyn Answer>> {
    let only = |recursor: &String| {
        let recursion = RecursionConfig {
            disabled: false,
            recursors: vec![recursor.clone()],
            excluded: Vec::new(),
            timeout: consul.dns.recursor_timeout,
            ..config.recursion.clone()
        };
        let cache = CacheConfig { enabled: false, ..config.cache };
        Upstream::new(&Config { recursion, cache, ..config.clone() }, own).recursors()
    };
    let each: Vec<CachedSource> = consul.recursors.iter().filter_map(only).collect();
    let recursors = Recursors { each, random: consul.dns.random_recursors };
    (!recursors.each.is_empty()).then(|| Arc::new(recursors) as Arc<dyn Answer>)
}

impl Answer for Recursors {
    fn answer<'a>(&'a self, query: &'a Query<'a>, transport: Transport) -> BoxFuture<'a, Vec<u8>> {
        Box::pin(async move {
            let mut order: Vec<&CachedSource> = self.each.iter().collect();
            if self.random {
                fastrand::shuffle(&mut order);
            }
            for recursor in order {
                let reply = recursor.answer(query, transport).await;
                let rcode = reply.get(3).map(|flags| ResponseCode::from_low(flags & 15));
                if matches!(rcode, Some(ResponseCode::NoError | ResponseCode::NXDomain)) {
                    return reply;
                }
            }
            empty_reply(query, ResponseCode::ServFail, ReplyFlags::RECURSION)
        })
    }
}
